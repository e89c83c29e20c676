"""Parts of the condition of an image diffusion, one file each."""
