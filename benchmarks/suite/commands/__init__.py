"""The commands: options, and how records are shown. None imports torch before it runs."""
