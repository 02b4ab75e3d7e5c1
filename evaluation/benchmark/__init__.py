"""Runs with a known, verified cause: how they are planned, made, verified and kept."""
