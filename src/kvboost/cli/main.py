"""Entry point of the `kvboost` command."""


def main() -> None:
    """To come."""
