"""The trace viewer as a person meets it, in Debian's Chromium."""
