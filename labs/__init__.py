"""The course's exercises: starters and hints by phase, and the kit that makes and grades them."""
