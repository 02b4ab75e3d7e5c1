"""Programs that failed in the field, each with its repaired twin."""
