"""What the pages that belong to no single app show: one module for each page."""
