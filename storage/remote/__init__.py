"""Object stores by way of fsspec drivers, and requests that only S3 knows."""
