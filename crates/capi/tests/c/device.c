/* Domains of PCI devices: every misuse. No device is needed, and none is opened. */
#include "check.h"

static void refusals(void) {
    pf_domain_t *domain = NULL, *soft;
    REFUSED(EFAULT, "`out` is NULL", pf_domain_vfio("0000:01:00.0", PF_IOMMU_BEST, NULL));
    REFUSED(EFAULT, "`bdf` is NULL", pf_domain_vfio(NULL, PF_IOMMU_BEST, &domain));
    REFUSED(EINVAL, "iommu 0x7", pf_domain_vfio("0000:01:00.0", 7, &domain));
    REFUSED(EINVAL, "nonsense", pf_domain_vfio("nonsense", PF_IOMMU_BEST, &domain));
    REFUSED(EINVAL, "not UTF-8", pf_domain_vfio("\xff", PF_IOMMU_TYPE1, &domain));
    /* A domain number that no machine has. */
    REFUSED(ENODEV, "fffe:1f:1f.7", pf_domain_vfio("fffe:1f:1f.7", PF_IOMMU_IOMMUFD, &domain));
    CHECK(domain == NULL);
    OK(pf_domain_soft(&soft));
    REFUSED(ENOTSUP, "pf_domain_vfio", pf_domain_attach(soft, "0000:01:00.0"));
    REFUSED(EFAULT, "`bdf` is NULL", pf_domain_attach(soft, NULL));
    REFUSED(ENODEV, "0000:01:00.0", pf_domain_detach(soft, "0000:01:00.0"));
    REFUSED(EFAULT, "`bdf` is NULL", pf_domain_detach(soft, NULL));
    OK(pf_domain_destroy(soft));
    REFUSED(EBADF, "destroyed", pf_domain_attach(soft, "0000:01:00.0"));
    REFUSED(EBADF, "destroyed", pf_domain_detach(soft, "0000:01:00.0"));
    REFUSED(EBADF, "destroyed", pf_domain_destroy(soft));
}

int main(void) {
    refusals();
    puts("device: ok");
    return 0;
}
