"""Stand-ins for what a test cannot have in numbers: no engine computes anything here."""
