"""`python -m neuraldbg`."""

from neuraldbg.cli import app

if __name__ == "__main__":
    app(prog_name="neuraldbg")
