"""A store that several machines share: records in Redis or S3, behind RAM and disk."""
