"""The page of `meshrl ui`: a small web server over the files of runs, and what it shows in a browser."""
