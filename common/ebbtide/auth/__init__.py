"""Who may call what: roles, tokens, certificates, and admission before every call."""
