"""What `dspark.verify` proves."""
