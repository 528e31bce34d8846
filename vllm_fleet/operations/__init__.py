"""Steps that pyinfra does not have: each compares and yields only what is needed."""
