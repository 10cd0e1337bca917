"""What a step learns from its rollouts: recipes, advantages, packed rows and losses; tensor math without I/O."""
