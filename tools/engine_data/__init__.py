"""Engine data from published wheels; see __main__."""
