"""What is wrong with a run, from the metrics that it wrote: for `meshrl doctor` and for the alerts of a run."""
