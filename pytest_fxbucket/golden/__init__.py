"""Goldens, the reviewed texts of schedules: written, read back, compared in words, stored, and accepted anew."""
