"""A store that several machines share, on real servers: Redis (one, and a cluster) and S3."""
