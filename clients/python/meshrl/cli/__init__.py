"""The `meshrl` command: looks into a run and drives its services from a terminal."""
