"""What the tests share: batches, requests, servers, and observers from outside."""
