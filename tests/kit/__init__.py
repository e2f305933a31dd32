"""What several tests share: tiny models and runs, hosts, fakes. No test is in here."""
