"""How `rollout` finds and plays environments, which are tasksets for verifiers."""
