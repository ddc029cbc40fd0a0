"""Memory of a rank by arithmetic on `config.json`, and what needs less of it. Knows no torch."""
