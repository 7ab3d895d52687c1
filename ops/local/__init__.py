"""The whole stack on one machine: processes, embedded servers, sample models."""
