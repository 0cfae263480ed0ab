"""Jobs of this machine: processes that live as long as the command that started them, and files that stay."""
