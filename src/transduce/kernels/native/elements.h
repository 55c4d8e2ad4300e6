/* Elements of tensors in fp32 or bf16, the upper half of fp32. Sums are always fp32. */

INLINE float read_element(const void *x, int64_t i, int bf16) {
    if (!bf16) return ((const float *)x)[i];
    uint32_t bits = (uint32_t)((const uint16_t *)x)[i] << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE void write_element(void *y, int64_t i, float value, int bf16) {
    if (!bf16) {
        ((float *)y)[i] = value;
        return;
    }
    uint32_t bits;
    memcpy(&bits, &value, 4);
    ((uint16_t *)y)[i] = (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16); /* to the nearest, ties to even */
}

INLINE float fast_tanh(float x) {
    float power = fast_exp(-2 * fabsf(x));
    return copysignf((1 - power) / (1 + power), x);
}
