// What compiled code is to torch: the operations torch.ops.ortholand.*, on libtorch's stable ABI.
//
// Everything is checked here, before anything is moved: beyond this file a wrong address or length
// reads or overwrites other memory. Negated views, subclasses and transforms' tensors do not get
// this far, or with values of their own: torch's dispatcher and optim/engines/compiled.py see to it.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <tuple>
#include <vector>

// Only its functions in C, because its C++ needs a newer libstdc++ than wheels may use.
#include <torch/csrc/stable/c/shim.h>

#include "steps.h"

using Landing = void (*)(const Options*, Parameter*, int);

namespace {

constexpr int64_t LARGEST_P = 128;       // as in tiles.h
constexpr int64_t LANES_UP_TO = 8;       // columns of matrices that are computed side by side,
constexpr int64_t LANES_FROM = 4;        // if there are so many of them,
constexpr int64_t SLICES_FROM = 512;     // or if one has so many entries: its rows are dealt out
constexpr int64_t FULL = 7, FULL_SLICES_FROM = 2048;  // so many columns nearly fill a vector
constexpr int64_t LONG_VECTORS = 16;     // stands for code of large matrices in vectors of 64 bytes
#ifdef __AVX512F__
constexpr bool HAS_LONG_VECTORS = true;
#else
constexpr bool HAS_LONG_VECTORS = false;
#endif

// Why a weight is refused; named again in optim/engines/compiled.py.
enum Refusal : int64_t {
    TAKEN = 0, DEVICE = -1, TYPE = -2, SHAPE = -3, STATE_SHAPE = -4, LAYOUT = -5, OTHER_LAYOUT = -6,
    MEMORY = -7, SIZE = -8, NO_KERNELS = -9
};

// Compiled landing.cpp, by type (float, double) and columns: 0 and LONG_VECTORS are for all
// matrices, others for matrices side by side. Each is its own library.
struct Kernels {
    Landing landing;
    bool asked;  // somebody has looked for them, and they may be missing all the same
} kernels_of[2][LONG_VECTORS + 1];

// What torch hands over ---------------------------------------------------------------------------

[[noreturn]] void fail(const char* why) { throw std::runtime_error(why); }

void check(AOTITorchError error) {
    if (error) fail("ortholand: torch cannot read a tensor.");
}

// Values on torch's stack are in the first bytes of 8.
template <class T>
T as(StableIValue value) {
    T result;
    std::memcpy(&result, &value, sizeof(T));
    return result;
}

template <class T>
StableIValue from(T value) {
    StableIValue result = 0;
    std::memcpy(&result, &value, sizeof(T));
    return result;
}

// Tensors, one or a list, which are ours and must be deleted.
class Tensors {
    std::vector<AtenTensorHandle> handles;

public:
    Tensors() = default;
    Tensors(const Tensors&) = delete;
    ~Tensors() {
        for (AtenTensorHandle handle : handles) aoti_torch_delete_tensor_object(handle);
    }
    void take(StableIValue value) { handles.push_back(as<AtenTensorHandle>(value)); }
    void take_list(StableIValue value) {
        const auto list = as<StableListHandle>(value);
        size_t n = 0;
        AOTITorchError error = torch_list_size(list, &n);
        handles.reserve(n);
        for (size_t i = 0; i < n && !error; ++i) {
            StableIValue item;
            error = torch_list_get_item(list, i, &item);
            if (!error) take(item);
        }
        torch_delete_list(list);
        check(error);
    }
    size_t size() const { return handles.size(); }
    AtenTensorHandle operator[](size_t i) const { return handles[i]; }
    auto begin() const { return handles.begin(); }
    auto end() const { return handles.end(); }
};

// What is read of a tensor, once.
struct Seen {
    void* start;
    const int64_t *sizes, *strides;
    int64_t dim, numel;
    int32_t dtype;
    bool on_cpu, in_memory;

    explicit Seen(AtenTensorHandle handle) {
        int32_t device, layout;
        check(aoti_torch_get_device_type(handle, &device));
        check(aoti_torch_get_layout(handle, &layout));
        check(aoti_torch_get_dtype(handle, &dtype));
        on_cpu = device == CPU && layout == STRIDED;
        in_memory = false, start = nullptr, sizes = strides = nullptr, dim = numel = 0;
        if (!on_cpu) return;
        int64_t *size, *stride, offset, bytes;
        check(aoti_torch_get_dim(handle, &dim));
        check(aoti_torch_get_numel(handle, &numel));
        check(aoti_torch_get_sizes(handle, &size));
        check(aoti_torch_get_strides(handle, &stride));
        check(aoti_torch_get_storage_offset(handle, &offset));
        check(aoti_torch_get_storage_size(handle, &bytes));
        check(aoti_torch_get_data_ptr(handle, &start));
        sizes = size, strides = stride;
        // Only dense tensors are taken: `numel` numbers from the first on.
        in_memory = !numel || (start && bytes >= (offset + numel) * item_size());
    }

    bool is_float() const { return dtype == FLOAT; }
    bool is_known() const { return dtype == FLOAT || dtype == DOUBLE; }
    int64_t item_size() const { return dtype == FLOAT ? 4 : 8; }
    bool has_layout_of(const Seen& other) const {
        for (int64_t i = 0; i < dim; ++i)
            if (sizes[i] != 1 && strides[i] != other.strides[i]) return false;
        return true;
    }
    // Whether the numbers are without gaps, in any order of dimensions.
    bool is_dense() const {
        int64_t expected = 1;
        for (int64_t done = 0, left = numel; left > 1; left = numel / expected, ++done) {
            int64_t next = -1;
            for (int64_t i = 0; i < dim; ++i)
                if (sizes[i] != 1 && strides[i] == expected) next = i;
            if (next < 0 || done == dim) return false;
            expected *= sizes[next];
        }
        return expected == numel;
    }
    bool is_contiguous() const {
        int64_t expected = 1;
        for (int64_t i = dim - 1; i >= 0; --i) {
            if (sizes[i] != 1 && strides[i] != expected) return false;
            expected *= sizes[i];
        }
        return true;
    }

    static const int32_t CPU, STRIDED, FLOAT, DOUBLE;
};
const int32_t Seen::CPU = aoti_torch_device_type_cpu();
const int32_t Seen::STRIDED = aoti_torch_layout_strided();
const int32_t Seen::FLOAT = aoti_torch_dtype_float32();
const int32_t Seen::DOUBLE = aoti_torch_dtype_float64();

// Wide matrices are tall ones, transposed; and square ones come transposed, too.
void set_matrix(Parameter& q, int64_t rows, int64_t columns, int64_t down, int64_t across) {
    if (rows <= columns) std::swap(rows, columns), std::swap(down, across);
    q.n = rows, q.p = columns, q.row_stride = down;
    q.column_stride = columns == 1 ? 1 : across;  // means nothing for one column
}

// How weights are matrices; named again in optim/engines/compiled.py.
enum Kind : int64_t { ONE = 0, STACK = 1, VECTOR = 2, GRID = 3 };
struct View {
    int64_t kind;
    int64_t size[2];  // of a grid: blocks down and across, or 0: each row, or column
};

// A grid of blocks of one matrix, (first dimension) x (all others), the latter dense in any order:
// that only permutes the columns, and a step of whole rows does not depend on it, if gradient and
// state have the same.
bool set_grid(Parameter& q, const Seen& X, const int64_t* grid) {
    const int64_t rows = X.sizes[0], columns = X.numel / rows, r = grid[0], c = grid[1];
    if (r < 1 || c < 1 || rows % r || columns % c) return false;
    const bool is_turned = rows > 1 && X.strides[0] != columns;
    if (is_turned && X.strides[0] != 1) return false;
    for (int64_t i = X.dim - 1, expected = is_turned ? rows : 1; c > 1 && i > 0; --i) {
        if (X.sizes[i] != 1 && X.strides[i] != expected) return false;
        expected *= X.sizes[i];
    }
    const int64_t down = is_turned ? 1 : columns, across = is_turned ? rows : 1;
    const int64_t a = rows / r, b = columns / c;
    q.count = r * c, q.inner = c > 1 ? c : r;
    q.inner_stride = c > 1 ? b * across : a * down;
    q.outer_stride = c > 1 && r > 1 ? a * down : q.inner * q.inner_stride;
    set_matrix(q, a, b, down, across);
    return true;
}

// A stack of the matrices in the last two dimensions, in up to two levels.
bool set_stack(Parameter& q, const Seen& X) {
    int64_t size[2] = {1, 1}, stride[2] = {0, 0};
    int levels = 0;
    for (int64_t i = X.dim - 3; i >= 0; --i) {
        if (X.sizes[i] == 1) continue;
        if (levels && X.strides[i] == size[levels - 1] * stride[levels - 1]) {
            size[levels - 1] *= X.sizes[i];
        } else {
            if (levels == 2) return false;
            size[levels] = X.sizes[i], stride[levels++] = X.strides[i];
        }
    }
    q.count = size[0] * size[1];
    q.inner = size[0], q.inner_stride = stride[0];
    q.outer_stride = levels == 2 ? stride[1] : q.inner * q.inner_stride;
    set_matrix(q, X.sizes[X.dim - 2], X.sizes[X.dim - 1], X.strides[X.dim - 2],
               X.strides[X.dim - 1]);
    return true;
}

Options options_of(const Seen& seen, View& view) {
    if (!seen.on_cpu || seen.dtype != Seen::DOUBLE || seen.numel != 20 || !seen.is_contiguous() ||
        !seen.in_memory)
        fail("ortholand: settings are 20 numbers of float64, on the CPU.");
    const double* x = static_cast<const double*>(seen.start);
    const auto choice = [x](int i) { return int32_t(x[i]); };
    view = {choice(17), {choice(18), choice(19)}};
    uint32_t threads;
    check(torch_get_num_threads(&threads));
    return {x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], x[8], x[9], x[10], x[11], choice(12),
            choice(13), choice(14), choice(15), choice(16), int32_t(threads)};
}

// Why a tensor cannot go with a weight X: of these sizes, and in the layout of X or contiguous.
Refusal misfit(const Seen& A, const Seen& X, int64_t dim, const int64_t* sizes, bool is_like_X) {
    if (!A.on_cpu) return DEVICE;
    if (A.dtype != X.dtype) return TYPE;
    if (A.dim != dim || !std::equal(A.sizes, A.sizes + dim, sizes)) return STATE_SHAPE;
    if (is_like_X ? !A.has_layout_of(X) : !A.is_contiguous()) return OTHER_LAYOUT;
    return A.in_memory ? TAKEN : MEMORY;
}
Refusal misfit(const Seen& A, const Seen& X) { return misfit(A, X, X.dim, X.sizes, true); }

// Reads a weight, its gradient and its state. `moved` has first all weights, then their state, one
// kind after the other.
Refusal read(const Tensors& moved, const Tensors& gradients, size_t i, const View& view,
             Parameter& q) {
    const Seen X(moved[i]), G(gradients[i]);
    q = Parameter{};
    q.index = int64_t(i), q.is_double = !X.is_float();
    if (!X.on_cpu || !G.on_cpu) return DEVICE;
    if (!X.is_known() || G.dtype != X.dtype) return TYPE;
    if (X.dim < (view.kind == VECTOR ? 1 : 2) || !X.numel) return SIZE;
    const Refusal of_gradient = misfit(G, X);
    if (of_gradient == STATE_SHAPE) return SHAPE;
    if (!X.is_dense()) return LAYOUT;
    const int64_t grid[2] = {view.size[0] ? view.size[0] : X.sizes[0],
                             view.size[1] ? view.size[1] : X.numel / X.sizes[0]};
    const bool is_stack = view.kind == STACK || (view.kind == ONE && X.dim == 2);
    if (view.kind == VECTOR)
        q.count = q.inner = 1, set_matrix(q, X.numel, 1, 1, 1);
    else if (!(is_stack ? set_stack(q, X) : set_grid(q, X, grid)))
        return LAYOUT;
    // There is a number for each matrix of a stack, or of a grid.
    const bool is_grid = view.kind == GRID;
    const int64_t numbers = view.kind == STACK ? X.dim - 2 : is_grid ? 2 : 0;
    if (q.p > LARGEST_P) return SIZE;
    if (!X.in_memory) return MEMORY;
    q.X = X.start, q.G = G.start;
    Refusal found = of_gradient;
    void** starts[] = {&q.state, &q.squares, &q.steps};
    for (size_t kind = 0, n = gradients.size(); (2 + kind) * n <= moved.size() && !found; ++kind) {
        const Seen A(moved[(1 + kind) * n + i]);
        found = kind == 0 ? misfit(A, X)
            : misfit(A, X, numbers, is_grid ? grid : X.sizes, false);
        *starts[kind] = A.start;
    }
    return found;
}

// Calls f(first, number) for the parameters of each type and shape.
template <class F>
void by_shape(std::vector<Parameter>& all, F f) {
    const auto shape = [](const Parameter& q) { return std::make_tuple(q.is_double, q.n, q.p); };
    const auto before = [&](const auto& a, const auto& b) { return shape(a) < shape(b); };
    if (!std::is_sorted(all.begin(), all.end(), before))
        std::stable_sort(all.begin(), all.end(), before);
    for (size_t first = 0, last; first < all.size(); first = last) {
        for (last = first; last < all.size() && shape(all[last]) == shape(all[first]);) ++last;
        f(&all[first], last - first);
    }
}

// Which of `kernels_of` would step these best.
int64_t columns_of(const Parameter* q, size_t some) {
    if (q->p > LANES_UP_TO) {
        // Not where rows that are filled up to whole vectors are longer by more than a quarter.
        const int64_t size = q->is_double ? 8 : 16, filled = (q->p + size - 1) / size * size;
        return HAS_LONG_VECTORS && q->p >= 16 && 4 * filled <= 5 * q->p ? LONG_VECTORS : 0;
    }
    const int64_t from = q->p < FULL ? SLICES_FROM : FULL_SLICES_FROM;
    int64_t count = q->n > q->p && q->n * q->p > from ? LANES_FROM : 0;
    for (size_t i = 0; i < some && count < LANES_FROM; ++i) count += q[i].count;
    return count < LANES_FROM ? 0 : q->p;
}

// Step weights, or only check whether they can step.
//
// Either all step or none does. Gives nothing if all did, or can, without further ado. Else a list
// that begins with 1 if they did, and how many matrices of each weight were skipped, and limited; or
// with 0 if none did, and for each weight a negative number, why it cannot step; or 0, if it can;
// or 1 + the columns for which kernels must be added first, if there are any.
std::vector<int64_t> landing_step(const Tensors& moved, const Tensors& gradients, const Options& o,
                                  const View& view, bool only_check) {
    const size_t n = gradients.size(), states = o.moments == ADAM ? 3 : o.moments == MOMENTUM;
    if (moved.size() != (1 + states) * n)
        fail("ortholand: each weight must have a gradient and its state.");
    std::vector<Parameter> all;
    std::vector<int64_t> answers(1 + n, TAKEN);
    bool any = false;
    all.reserve(n);
    for (size_t i = 0; i < n; ++i) {
        Parameter q;
        answers[1 + i] = read(moved, gradients, i, view, q);
        if (answers[1 + i] == TAKEN) all.push_back(q);
    }
    by_shape(all, [&](const Parameter* some, size_t count) {
        const Kernels* of_type = kernels_of[some->is_double];
        const int64_t columns = of_type[0].asked ? columns_of(some, count) : 0;
        const int64_t answer = !of_type[columns].asked ? 1 + columns
            : of_type[0].landing ? TAKEN : NO_KERNELS;
        for (size_t i = 0; i < count; ++i) answers[1 + some[i].index] = answer;
    });
    for (int64_t answer : answers) any |= answer != TAKEN;
    if (any) return answers;
    if (only_check) return {};
    by_shape(all, [&](Parameter* some, size_t count) {
        const Kernels* of_type = kernels_of[some->is_double];
        const Landing best = of_type[columns_of(some, count)].landing;
        (best ? best : of_type[0].landing)(&o, some, int(count));
    });
    for (const Parameter& q : all) any |= q.skipped || q.limited;
    if (!any) return {};
    answers.assign(1 + 2 * n, 1);
    for (const Parameter& q : all)
        answers[1 + q.index] = q.skipped, answers[1 + n + q.index] = q.limited;
    return answers;
}

template <class T>
bool is_below(const T* x, int64_t n, T bound) {
    const int64_t part = n / 4;  // memory is faster in several places at once
    int beyond = 0;              // or-ed: a sum of very many would overflow
    const auto look = [=](int64_t j) { return int(!(std::fabs(x[j]) < bound)); };
#pragma omp simd reduction(| : beyond)
    for (int64_t j = 0; j < part; ++j)
        beyond |= look(j) | look(j + part) | look(j + 2 * part) | look(j + 3 * part);
    for (int64_t j = 4 * part; j < n; ++j) beyond |= look(j);
    return !beyond;
}

// Whether |x| < limit for every x in dense arrays; false for NaN, and for what cannot be read. And
// whether others, of one kind after the other, are tensors of the same types, shapes and layouts.
bool all_below(const Tensors& tensors, double limit, const Tensors& others) {
    for (size_t i = 0; i < others.size(); ++i) {
        if (!tensors.size()) return false;
        const Seen x(others[i]), like(tensors[i % tensors.size()]);
        if (!like.on_cpu || misfit(x, like) != TAKEN) return false;
    }
    for (AtenTensorHandle tensor : tensors) {
        const Seen x(tensor);
        if (!x.on_cpu || !x.is_known()) return false;
        if (!x.numel) continue;
        if (!x.is_dense() || !x.in_memory) return false;
        if (x.is_float() ? !is_below(static_cast<const float*>(x.start), x.numel, float(limit))
                         : !is_below(static_cast<const double*>(x.start), x.numel, limit))
            return false;
    }
    return true;
}

// The operations, as torch calls them ------------------------------------------------------------

void boxed_landing_step(StableIValue* stack, uint64_t, uint64_t) {
    Tensors moved, gradients, settings;
    settings.take(stack[2]);
    moved.take_list(stack[0]), gradients.take_list(stack[1]);
    View view;
    const Options o = options_of(Seen(settings[0]), view);
    const std::vector<int64_t> answers =
        landing_step(moved, gradients, o, view, as<bool>(stack[3]));
    StableListHandle list;
    check(torch_new_list_reserve_size(answers.size(), &list));
    for (int64_t answer : answers) check(torch_list_push_back(list, from(answer)));
    stack[0] = from(list);
}

void boxed_all_below(StableIValue* stack, uint64_t, uint64_t) {
    Tensors tensors, others;
    tensors.take_list(stack[0]), others.take_list(stack[2]);
    stack[0] = from(all_below(tensors, as<double>(stack[1]), others));
}

bool register_all(const char* space) {
    TorchLibraryHandle names, code;  // kept for ever: the operations would be taken back otherwise
    return !(aoti_torch_library_init_fragment(space, __FILE__, __LINE__, &names) ||
             aoti_torch_library_init_impl(space, "CPU", __FILE__, __LINE__, &code) ||
             aoti_torch_library_def(names,
                                    "landing_step(Tensor(a!)[] moved, Tensor[] gradients, "
                                    "Tensor settings, bool only_check) -> int[]") ||
             aoti_torch_library_def(
                 names, "all_below(Tensor[] tensors, float limit, Tensor[] others) -> bool") ||
             torch_library_impl(code, "landing_step", boxed_landing_step, TORCH_ABI_VERSION) ||
             torch_library_impl(code, "all_below", boxed_all_below, TORCH_ABI_VERSION));
}

}  // namespace

extern "C" {

// Give torch the operations, in a namespace. Not when the library is loaded, as is usual: there an
// error would end the process. 0, or 1 if torch would not have them.
int ortholand_register(const char* space) { return register_all(space) ? 0 : 1; }

// Kernels of a type and some columns, or null if there are none.
void ortholand_add_kernels(int is_double, int columns, Landing landing) {
    if (columns >= 0 && columns <= LONG_VECTORS)
        kernels_of[is_double ? 1 : 0][columns] = {landing, true};
}
}
