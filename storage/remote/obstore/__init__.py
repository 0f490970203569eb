"""Objects in S3, Google Cloud Storage and Azure by way of obstore, the faster engine."""
