"""How the parts of a role run: step by step, with pauses after errors, until they are stopped."""
