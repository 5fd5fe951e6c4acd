"""What other libraries and earlier versions of JAX have: shardings by position, tables as columns."""
