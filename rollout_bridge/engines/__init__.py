"""What can stand behind a bridge."""
