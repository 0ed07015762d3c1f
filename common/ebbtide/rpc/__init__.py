"""gRPC, for servers and clients alike: factories, authentication, one table of statuses, and conversion of records."""
