"""The command `python -m meshrl.environments.reasoning_demonstrations`."""

from .demonstrations import main

main()
