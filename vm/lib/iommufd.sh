# shellcheck shell=bash
# The small kernel with iommufd, which vm/kernel-iommufd builds. Sourced; needs tools.sh.

# The package of its source, for all architectures, and the suite of Debian's archive that has it.
iommufd_source=linux-source-7.3
iommufd_suite=trixie-backports

# iommufd_kernel: prints its folder. One of another version is another folder.
iommufd_kernel() { printf '%s\n' "$(cache_folder)/iommufd-${iommufd_source##*-}"; }
