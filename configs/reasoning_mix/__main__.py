"""`python -m meshrl.environments.reasoning_demonstrations FILE FOLDER` writes the demonstrations of this example."""

from .demonstrations import main

main()
