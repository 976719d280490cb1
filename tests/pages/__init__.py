# SPDX-License-Identifier: Apache-2.0
"""What the pages of MLflow and Prefect show in a browser: `make test-pages`."""
