"""Set-up, services and deployment around Plumbline; not part of the installed package."""
