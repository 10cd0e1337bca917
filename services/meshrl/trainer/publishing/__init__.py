"""From the weights of a step to a version at the hub: snapshots, files or broadcasts, upload and seal."""
