"""`meshrl ui`: a small web server over the files of runs."""
