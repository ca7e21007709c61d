"""Pure tensor functions. A plain-torch reference specifies each native kernel."""
