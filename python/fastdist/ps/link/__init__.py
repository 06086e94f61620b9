"""Sockets of servers, clients, coordinators and workers: who listens, and who connects."""
