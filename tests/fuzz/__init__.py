"""A fuzzer: random requests on one model that changes all the time, compared with its own generate."""
