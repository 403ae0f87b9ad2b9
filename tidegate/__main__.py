"""``python -m tidegate``, the command line of the supervisor process."""

from tidegate.cli import main

if __name__ == "__main__":
    main()
