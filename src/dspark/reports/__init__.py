"""What `dspark.inspect` shows."""
