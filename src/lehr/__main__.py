"""`python -m lehr` is `lehr`."""

from lehr.cli.main import main

if __name__ == "__main__":
    main()
