"""What every other package may import, and what imports none of them.

Errors, and reasons in a person's words; stacks; back-offs; and what connects a client, a worker or an agent with its master:
environment variables, credentials, certificates, channels. Only `channel` imports gRPC, and no module imports a framework.
"""
