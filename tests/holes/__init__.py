"""What a hostile review broke, one file per hole."""
