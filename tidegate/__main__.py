"""``python -m tidegate``: what the supervisor is started as."""

from tidegate.cli import main

if __name__ == "__main__":
    main()
