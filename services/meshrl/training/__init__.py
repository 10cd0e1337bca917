"""What the RL trainer and the SFT trainer share: optimizer, schedule, forward and backward over packed rows."""
