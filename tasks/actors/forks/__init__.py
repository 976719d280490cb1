# SPDX-License-Identifier: Apache-2.0
"""Three programs by which Ray's workers begin with their imports done; none imports the project."""
