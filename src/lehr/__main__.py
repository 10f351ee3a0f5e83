"""`python -m lehr` is `lehr`. Signals first: what follows imports for seconds."""

from lehr import signals


def main() -> None:
    """Entry point of the command."""
    signals.own()
    from lehr.cli.main import main as command

    command()


if __name__ == "__main__":
    main()
