"""`python -m shardwise.cli` is the console script `shardwise`."""

from shardwise.cli import main

if __name__ == "__main__":  # ranks are new processes that import this file again under another name
    main()
