"""What users' own tests assert with: goldens by name, and expectations that stand in the test itself."""
